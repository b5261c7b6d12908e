"""Random networks of image operators in strips of rows, beside the whole: ``python -m benchmarks.trust.strips``.

Each network is planned for the CPU and as a portable plan, in 2 to 8 strips, through the independent checker. Its
results are compared with stock onnxruntime's bit by bit, and the plan for the CPU is run once more with all bytes
poisoned that hold nothing any more. ``--first N --networks 1 --show`` replays network N.
"""

import os
import random
import re
import sys
import time
from collections import Counter

import click

from benchmarks.machine import machine
from tests.support.image_networks import ImageNetwork, judge

DEVICES = ("cpu", "none")

WRONG = ("differs", "dies early", "raises")


def drawn(seed: int) -> tuple[ImageNetwork, int]:
    """A network, and how many strips it is to run in."""
    chance = random.Random(seed)
    network = ImageNetwork(chance.choice, chance.randint(24, 60), chance.choice((1, 1, 2, 4)))
    for _ in range(chance.randint(3, 12)):
        network.grow()
    last = network.images[-1]  # of whose channels one is left, so that results don't take most
    network.emit("Conv", last, network.weight(1, network.dims(last)[1], 1, 1))
    return network, chance.randint(2, 8)


def judged(seed: int, device: str) -> tuple[str, str]:
    """The verdict on one network, an error included."""
    network, strips = drawn(seed)
    try:
        return judge(network, strips, device) if network.nodes else ("empty", "")
    except Exception as error:  # whatever it is: it is told
        return "raises", f"{type(error).__name__}: {error}"


@click.command()
@click.option("--networks", default=2000, show_default=True, help="How many are drawn.")
@click.option("--first", default=0, show_default=True, help="Seed of the first.")
@click.option("--show", is_flag=True, help="Print each network and its verdict.")
def main(networks: int, first: int, show: bool) -> None:
    """Draw networks, and print how many give what."""
    begin, verdicts, wrong, reasons = time.process_time(), Counter[tuple[str, str]](), list[str](), Counter[str]()
    for seed in range(first, first + networks):
        for device in DEVICES:
            verdict, said = judged(seed, device)
            verdicts[verdict, device] += 1
            reasons[re.sub(r"'[^']*'", "...", said.rsplit("strips: ", 1)[-1])] += verdict == "refused"
            if verdict in WRONG:
                wrong.append(f"{verdict}: --first {seed} --networks 1 ({device}): {said[:200]}")
                print(wrong[-1], file=sys.stderr, flush=True)
            if show:
                kinds = " ".join(node.op_type for node in drawn(seed)[0].nodes)
                print(f"{seed} {device}: {verdict}: {said}; {kinds}")
    packages = machine(("memonger", "onnx", "onnx-ir", "onnxruntime", "numpy"))
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"command: python -m benchmarks.trust.strips {' '.join(sys.argv[1:])}\nmachine: {packages}\nload: {load}")
    print(f"seconds of the processor: {time.process_time() - begin:.0f}\n")
    print(f"{'networks':<14}" + "".join(f"{device:>8}" for device in DEVICES))
    for verdict in dict.fromkeys(verdict for verdict, _ in sorted(verdicts)):
        print(f"{verdict:<14}" + "".join(f"{verdicts[verdict, device]:>8}" for device in DEVICES))
    print("\nwhy networks are refused:")
    for reason, count in reasons.most_common(12):
        if count:
            print(f"{count:>6}  {reason[:150]}")
    if wrong:
        print("\n" + "\n".join(wrong))
        sys.exit(1)


if __name__ == "__main__":
    main()
