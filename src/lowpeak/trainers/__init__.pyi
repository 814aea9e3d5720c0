from lowpeak.trainers.configs import GRPOConfig as GRPOConfig
from lowpeak.trainers.configs import OnlineConfig as OnlineConfig
from lowpeak.trainers.grpo import GRPOTrainer as GRPOTrainer
from lowpeak.trainers.online import OnlineTrainer as OnlineTrainer
