from lowpeak.report.page import watch_report as watch_report
from lowpeak.report.page import write_report as write_report
from lowpeak.report.run_data import has_journal as has_journal
