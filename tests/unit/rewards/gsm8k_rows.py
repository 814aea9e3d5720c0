"""Answers in the shape of GSM8K's: all of it where `LOWPEAK_GSM8K` names its folder, else twenty of our own."""

from __future__ import annotations

import json
import os
from pathlib import Path

OWN = [
    ("Mia has 3 bags of 4 apples.", "3 bags hold 3*4=<<3*4=12>>12 apples.\n#### 12"),
    ("A train goes 60 miles an hour for 18 hours.", "It goes 60*18=<<60*18=1080>>1,080 miles.\n#### 1,080"),
    ("The night was 9 degrees colder than 2.", "It was 2-9=<<2-9=-7>>-7 degrees.\n#### -7"),
    ("A city spends $109,200,000 on roads.", "All of it: $109,200,000.\n#### 109,200,000"),
    ("Tom earns $12 an hour for 50 minutes.", "12/60 = $<<12/60=0.2>>0.2 a minute.\n0.2*50 = $10\n#### 10"),
    ("Nobody came.", "There were 5-5=<<5-5=0>>0 guests.\n#### 0"),
    ("Half of a half of 100%.", "50% of 50% is 0.5*50=<<0.5*50=25>>25%.\n#### 25"),
    ("Lee reads 20 pages a day in May.", "May has 31 days: 20*31=<<20*31=620>>620 pages.\n#### 620"),
    ("A field is 30 by 45 feet.", "30*45=<<30*45=1350>>1350 square feet.\n#### 1350"),
    ("Ann shares 7 cakes among 14.", "Each gets 7/14=<<7/14=0.5>>0.5 of a cake.\nThat is 50 of 100.\n#### 50"),
    ("A score of 1-0 in 3 games.", "They scored 1+1+1=<<1+1+1=3>>3 goals.\n#### 3"),
    ("Sam owes $40 and pays $15.", "He owes 40-15=$<<40-15=25>>25.\n#### 25"),
    ("A dozen eggs, 2 broken.", "12-2=<<12-2=10>>10 eggs are whole.\n#### 10"),
    ("A year of weeks.", "There are 52 weeks.\n#### 52"),
    ("Price up 10% from $200.", "It rises 200*0.1=$<<200*0.1=20>>20.\nSo it is 200+20=$<<200+20=220>>220.\n#### 220"),
    ("Ben runs 5 km twice.", "5*2=<<5*2=10>>10 km\n#### 10"),
    ("A million and one.", "1,000,000+1=<<1000000+1=1000001>>1,000,001\n#### 1,000,001"),
    ("Eight legs a spider, 9 spiders.", "8*9=<<8*9=72>>72 legs.\n#### 72"),
    ("Water falls from 3 to -12.", "It changes by -12-3=<<-12-3=-15>>-15.\n#### -15"),
    ("Two dice.", "The most is 6+6=<<6+6=12>>12.\n#### 12"),
]


def answers() -> list[str]:
    """Every answer, worked steps and `#### number`."""
    folder = os.environ.get("LOWPEAK_GSM8K")
    if not folder:
        return [answer for _, answer in OWN]
    lines = [line for name in ("train", "test") for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line)["answer"] for line in lines]
