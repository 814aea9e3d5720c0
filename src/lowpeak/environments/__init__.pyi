from lowpeak.environments.engine import EnvironmentEngine as EnvironmentEngine
from lowpeak.environments.tool_results import ResultRow as ResultRow
from lowpeak.environments.tool_results import ToolResults as ToolResults
from lowpeak.environments.tools import Toolset as Toolset
