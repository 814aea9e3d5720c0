"""An error for TRL's `experimental`, whose trainers are in `lowpeak` itself or in TRL."""

raise ImportError(
    "lowpeak has no experimental: import OnlineDPOTrainer, PPOTrainer and their configs from lowpeak itself, and other trainers "
    "from trl.experimental, which works next to lowpeak."
)
