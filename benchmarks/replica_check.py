"""The cost of train.replica_check_interval; see step_costs.py.
python benchmarks/replica_check.py BUILD [--rounds 5] [--steps 100] [--interval 1] [--limit 1.01]
                                   [--set FIELD=VALUE ...]"""

from step_costs import compare

if __name__ == "__main__":
    compare(__doc__, lambda options: [f"train.replica_check_interval={options.interval}"])
