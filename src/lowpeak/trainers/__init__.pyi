from lowpeak.trainers.configs import GRPOConfig as GRPOConfig
from lowpeak.trainers.grpo import GRPOTrainer as GRPOTrainer
