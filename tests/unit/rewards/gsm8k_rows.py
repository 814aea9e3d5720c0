"""Answers in the shape of GSM8K's: all of it where `LOWPEAK_GSM8K` names its folder, else eight of our own."""

from __future__ import annotations

import json
import os
from pathlib import Path

OWN = [
    ("A train goes 60 miles an hour for 18 hours.", "It goes 60*18=<<60*18=1080>>1,080 miles.\n#### 1,080"),
    ("The night was 9 degrees colder than 2.", "It was 2-9=<<2-9=-7>>-7 degrees.\n#### -7"),
    ("A city spends $109,200,000 on roads.", "All of it: $109,200,000.\n#### 109,200,000"),
    ("Tom earns $12 an hour for 50 minutes.", "12/60 = $<<12/60=0.2>>0.2 a minute.\n0.2*50 = $10\n#### 10"),
    ("Nobody came.", "There were 5-5=<<5-5=0>>0 guests.\n#### 0"),
    ("A field is 30 by 45 feet.", "30*45=<<30*45=1350>>1350 square feet.\n#### 1350"),
    ("A score of 1-0 in 3 games.", "They scored 1+1+1=<<1+1+1=3>>3 goals.\n#### 3"),
    ("Price up 10% from $200.", "It rises 200*0.1=$<<200*0.1=20>>20.\nSo it is 200+20=$<<200+20=220>>220.\n#### 220"),
]


def answers() -> list[str]:
    """Every answer, worked steps and `#### number`."""
    folder = os.environ.get("LOWPEAK_GSM8K")
    if not folder:
        return [answer for _, answer in OWN]
    lines = [line for name in ("train", "test") for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line)["answer"] for line in lines]
