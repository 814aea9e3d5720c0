from lowpeak.rollout.engine import RolloutEngine as RolloutEngine
from lowpeak.rollout.engine import SliceForm as SliceForm
from lowpeak.rollout.engine import check_lengths as check_lengths
from lowpeak.rollout.function import FunctionEngine as FunctionEngine
from lowpeak.rollout.pending import Pending as Pending
from lowpeak.rollout.sampling import TokenDraw as TokenDraw
