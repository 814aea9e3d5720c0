from lowpeak.plan.rehearsal.fake_ranks import FakeStrategy as FakeStrategy
from lowpeak.plan.rehearsal.rehearsal import Rehearsal as Rehearsal
from lowpeak.plan.rehearsal.rehearsal import rehearse as rehearse
from lowpeak.plan.rehearsal.rehearsal_inputs import MeshShape as MeshShape
from lowpeak.plan.rehearsal.rehearsal_inputs import RehearsalInputs as RehearsalInputs
from lowpeak.plan.rehearsal.rehearsal_inputs import RehearsedRollout as RehearsedRollout
from lowpeak.plan.rehearsal.rehearsal_inputs import RewardPass as RewardPass
