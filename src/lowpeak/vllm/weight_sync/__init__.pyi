from lowpeak.vllm.weight_sync.lora import adapter_config as adapter_config
from lowpeak.vllm.weight_sync.push import PushReport as PushReport
from lowpeak.vllm.weight_sync.push import available_transports as available_transports
from lowpeak.vllm.weight_sync.push import exhaust_slices as exhaust_slices
from lowpeak.vllm.weight_sync.push import loaded_version as loaded_version
from lowpeak.vllm.weight_sync.push import push_weights as push_weights
from lowpeak.vllm.weight_sync.push import verify_unchanged as verify_unchanged
