"""The cost of copies of the state in the other rank's memory (checkpoint.in_memory_replicas = 1);
see step_costs.py.
python benchmarks/state_copies.py BUILD [--rounds 5] [--steps 100] [--interval 1] [--limit 1.1]
                                  [--set FIELD=VALUE ...]"""

from step_costs import compare

if __name__ == "__main__":
    compare(__doc__, lambda options: ["checkpoint.in_memory_replicas=1",
                                      f"checkpoint.in_memory_interval={options.interval}"],
            common=["train.elastic=dp"], limit=1.1)
