from lowpeak.trainers.constructor import base_arguments as base_arguments
from lowpeak.trainers.grpo import GRPOTrainer as GRPOTrainer
from lowpeak.trainers.ppo import attach_critic as attach_critic
