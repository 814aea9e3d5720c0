from lowpeak.environments.engine import EnvironmentEngine as EnvironmentEngine
from lowpeak.environments.tools import Toolset as Toolset
