"""An error for TRL's `experimental`."""

raise ImportError("lowpeak.experimental does not exist: lowpeak has OnlineDPOTrainer and PPOTrainer, TRL the others.")
