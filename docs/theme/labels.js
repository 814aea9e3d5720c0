// Each code block has a navigation of one button, which the theme adds when the block comes into view: readers of landmarks skip it.
new MutationObserver(() => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) nav.setAttribute("role", "presentation");
}).observe(document.body, { childList: true, subtree: true });
