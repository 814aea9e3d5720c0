from lowpeak.cli.commands import main as main
