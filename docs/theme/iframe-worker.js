// The search runs in a worker, which browsers refuse to start from pages that are opened as files: a hidden frame takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true, title: "search" });
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.inner = inner;
      this.ready = new Promise((resolve) => {
        const load = (address) =>
          new Promise((loaded) => {
            const script = inner.document.createElement("script");
            script.src = address;
            script.onload = loaded;
            inner.document.body.append(script);
          });
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inner.importScripts = (...addresses) => addresses.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
        load(url).then(resolve);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
