from lowpeak.plan.rehearsal.fake_ranks import FakeStrategy as FakeStrategy
from lowpeak.plan.rehearsal.rehearsal import MeshShape as MeshShape
from lowpeak.plan.rehearsal.rehearsal import Rehearsal as Rehearsal
from lowpeak.plan.rehearsal.rehearsal import RehearsalInputs as RehearsalInputs
from lowpeak.plan.rehearsal.rehearsal import RehearsedRollout as RehearsedRollout
from lowpeak.plan.rehearsal.rehearsal import RewardPass as RewardPass
from lowpeak.plan.rehearsal.rehearsal import rehearse as rehearse
