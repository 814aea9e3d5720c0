from lowpeak.selftest.algorithm import check_algorithm as check_algorithm
from lowpeak.selftest.checks import Check as Check
from lowpeak.selftest.environment import EnvironmentCheck as EnvironmentCheck
from lowpeak.selftest.table import choose_rows as choose_rows
from lowpeak.selftest.table import run_rows as run_rows
from lowpeak.selftest.table import to_json as to_json
