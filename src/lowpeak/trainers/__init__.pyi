from lowpeak.trainers.base import Run as Run
from lowpeak.trainers.constructor import base_arguments as base_arguments
from lowpeak.trainers.grpo import GRPOTrainer as GRPOTrainer
from lowpeak.trainers.ppo_critic import check_reads as check_reads
