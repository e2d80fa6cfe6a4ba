"""Plans: what programs would need and cost on TPUs or GPUs that nobody has at hand.

gshard plan model --model=m4.MoE2048E36L --topology=v3:32x32 --out=PLAN
gshard plan model --model=m4.MoE128E12L --topology=h100:16x8 --out=GPUS --save
gshard plan model --model=nllb.MoE54B --topology=h100:1x8 --out=PLAN --programs=decode
gshard plan search --model=m4.MoE128E12L --topology=v3:8x8 --out=SEARCH
gshard plan machines --model=m4.MoE128E12L --out=MACHINES
gshard plan compare PLAN_A PLAN_B
gshard plan program --program=step.export --topology=v5p:4x4x4 --out=PLAN
gshard plan search_program --program=step.export --topology=v5p:4x4x4 --out=SEARCH
gshard plan calibrate --out=h100.json
"""

from xla_spmd.runtime import dispatch

# Each has its own flags.
_PROGRAMS = {
    "model": "lingvo_gshard.plan_model",
    "search": "lingvo_gshard.plan_search",
    "machines": "lingvo_gshard.plan_machines",
    "compare": "lingvo_gshard.plan_compare",
    "program": "xla_plan.plan_program",
    "search_program": "xla_plan.search_program",
    "calibrate": "xla_plan.calibrate",
}
_CLAUSES = {
    "model": "plans the programs of an experiment's runs",
    "search": "searches for the partitioning with which an experiment trains fastest",
    "machines": "plans an experiment's training step on several machines",
    "compare": "shows plans side by side",
    "program": "plans a program from a file of jax.export, StableHLO or HLO",
    "search_program": "searches for better ways to split such a program",
    "calibrate": "measures one device, for --rates of plans of such devices",
}


if __name__ == "__main__":
    dispatch.run("gshard plan", _PROGRAMS, _CLAUSES, "model")
