"""What tests of losses and steps start from: GRPO's and PPO's settings, and a strategy without an accelerator."""

from __future__ import annotations

from contextlib import nullcontext

from lowpeak.arguments.grpo import GRPOSettings, SAPOGate, VESPOWeight
from lowpeak.arguments.ppo import PPOSettings
from lowpeak.ranks import Ranks

GRPO = GRPOSettings(
    loss_type="dapo", importance_level="token", clip_low=0.2, clip_high=0.28, delta=None, scale_rewards="group",
    aggregation="sum_then_normalize", reward_weights=(1.0,), beta=0.0, kl_estimator="k3", bias_corrected_kl=False,
    entropy_bonus=None, top_entropy_quantile=1.0, max_completion_length=9,
    drop_equal_groups=False, score_old=True,
)  # fmt: skip
# What a loss type has beside GRPO's settings.
OF_LOSS_TYPE = {
    "cispo": {"clip_low": None, "delta": None},
    "sapo": {"sapo": SAPOGate(1.0, 1.3)},
    "vespo": {"vespo": VESPOWeight(2.0, 3.0, 3.0, 2.0)},
}
PPO = PPOSettings(
    beta=0.0, kl_estimator="k1", adaptive_kl=None, gamma=1.0, gae_lambda=0.95, clip_low=0.2, clip_high=0.28,
    value_clip=0.2, value_coef=0.5, whiten_rewards=False, whiten_advantages=True, missing_eos_penalty=0.0,
    early_stop_kl=None, value_warmup_steps=0, score_old=True,
)  # fmt: skip


class LocalStrategy:
    """One device without an accelerator: backward and nothing else."""

    ranks = Ranks()

    inplace_grad_scale = 1.0

    def micro_batch_context(self, model, last):
        return nullcontext()

    def backward(self, loss, last):
        loss.backward()

    def average_gradients(self, model):
        pass
