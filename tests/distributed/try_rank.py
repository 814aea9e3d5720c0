import sys, torch, time
from pathlib import Path
from setups import build, prepare
strategy, out = sys.argv[1], Path(sys.argv[2])
args = prepare(strategy)
t = build("GRPO", out/"run", args | ({"beta":0.04,"num_iterations":2} if "ref" in sys.argv else {}))
p = next(t.model.parameters())
t.train()
print("STRATEGY", t.accelerator.distributed_type, type(next(t.model.parameters())), type(t.model_wrapped).__name__, type(t.run.strategy).__name__)
print([ (round(h["loss"],6), round(h["grad_norm"],6)) for h in t.state.log_history if "loss" in h])
import hashlib
w={s.name:[] for s in t.run.strategy.slices(t.model_wrapped, 1<<10, None)}
for s in t.run.strategy.slices(t.model_wrapped, 1<<10, None): w[s.name].append(s.values)
w={k:torch.cat(v).double() for k,v in w.items()}
if t.args.process_index==0: torch.save(w,"/tmp/w/w_%s.pt"%strategy); print(len(w), sum(float(v.abs().sum()) for v in w.values()))
