from lowpeak.watchdog.connections import accept_authenticated as accept_authenticated
from lowpeak.watchdog.connections import network_id as network_id
from lowpeak.watchdog.failure_detector import detect_failures as detect_failures
from lowpeak.watchdog.orphans import PARENT_VARIABLE as PARENT_VARIABLE
from lowpeak.watchdog.orphans import exit_training_with_parent as exit_training_with_parent
from lowpeak.watchdog.orphans import exit_with_parent as exit_with_parent
from lowpeak.watchdog.orphans import watch_parent_in_forks as watch_parent_in_forks
