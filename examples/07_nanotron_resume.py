"""nanotron's trainer resumes a checkpoint of any topology; it prints what was loaded, kept and overridden.

torchrun --nproc-per-node 8 examples/07_nanotron_resume.py config.yaml --override-opt-param-scheduler

`parallelism` and `zero_stage` of config.yaml are those of the coming run; `resume_checkpoint_path` names a checkpoint
of any other. nanotron's own run_train.py needs the import alone; under `python -m ds_reshard.run` not even that.
"""

import argparse
import os
import sys

import ds_reshard
import ds_reshard.auto  # before or after nanotron is imported

try:
    from nanotron.trainer import DistributedTrainer
except ImportError as error:
    print(f"skipped: {error}; pip install git+https://github.com/huggingface/nanotron")
    sys.exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    config = ds_reshard.add_arguments(parser).parse_args().config
    trainer = DistributedTrainer(config)
    report = ds_reshard.last_report()
    if os.environ["RANK"] == "0":
        rates = sorted({group["lr"] for group in trainer.optimizer.get_base_optimizer().param_groups})
        print(f"goes on after iteration {trainer.metadata.last_train_step}, learning rates {rates}")
        print(report or "nothing was resumed")
    # trainer.train(get_dataloader(trainer)) follows, with the data of your run_train.py


if __name__ == "__main__":
    main()
