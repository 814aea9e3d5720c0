"""What vLLM's workers learn from lowpeak: `worker_extension_cls="lowpeak.rollout.vllm.weights.extension.Extension"`.

Imported by every worker before it loads its model. On CPUs vLLM repacks linear weights into oneDNN's own format and empties the
parameters, so that nothing could be loaded into them again, and a tied head would keep its old values. Importing this turns that
off.
"""

from __future__ import annotations

from lowpeak.rollout.vllm.weights.methods import Methods


def keep_parameters() -> None:
    """Let CPU models keep their weights as loaded; elsewhere nothing."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as custom_ops
        from vllm.model_executor.layers import utils

        custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **kwargs: False


keep_parameters()


class Extension(Methods):
    """vLLM mixes this into its worker class."""
