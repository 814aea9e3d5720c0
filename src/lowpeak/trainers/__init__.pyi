from lowpeak.trainers.configs import GRPOConfig as GRPOConfig
from lowpeak.trainers.configs import OnlineConfig as OnlineConfig
from lowpeak.trainers.configs import SFTConfig as SFTConfig
from lowpeak.trainers.grpo import GRPOTrainer as GRPOTrainer
from lowpeak.trainers.online import OnlineTrainer as OnlineTrainer
from lowpeak.trainers.sft import SFTTrainer as SFTTrainer
