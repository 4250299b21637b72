"""The CUDA path without a card: Algorithm 1 on tensors that have a device, but no numbers."""

import pytest

from config import Record
from experiments.fake_cuda import Crossing, NoStub, Trace, trace

SHORT: Record = {"lower_steps": 2, "upper_steps": 1}
# The log is read once a level: here the CPU waits. Nothing else leaves the device.
LOG = Crossing("read", "bisslight.py:read", 2)
# v and d of each of 12 blocks begin empty, on the CPU.
EMPTY = Crossing("_to_copy", "mfac.py:precompute", 24)


def traced(**settings: object) -> Trace:
    """An alternation; skips where the libraries that stand in for CUDA cannot be built."""
    try:
        return trace(SHORT | settings)
    except NoStub as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "method", "pretext", "gigabytes"),
    [
        ("vit_b16", "mfac", "mae", 13),  # tab:memory_single_gpu has 13, 19 and 33
        ("vit_l16", "mfac", "mae", 19),
        ("vit_h14", "mfac", "mae", 33),
        ("vit_b16", "identity", "mae", 13),
        ("vit_b16", "recursion", "mae", 13),
        ("vit_b16", "cg", "mae", 80),  # one H100
        ("vit_h14", "mfac", "ijepa", 65),
    ],
)
def test_an_alternation_mixes_no_devices_waits_for_the_log_alone_and_fits(
    backbone: str, method: str, pretext: str, gigabytes: float
) -> None:
    """A mixture of devices raises; in bfloat16 at the paper's batches, with 2 + 1 steps."""
    settings: Record = {"backbone": backbone, "hypergrad": method, "pretext": pretext}
    if pretext == "ijepa":
        settings["lower_steps"] = 1  # its teacher counts steps, and a count is a number
    found = traced(**settings)
    print(found)
    known = {LOG, EMPTY} if method == "recursion" else {LOG}
    assert {*found.crossings} == known
    stored = (20 - 2) * found.theta_GB  # G has 20 gradients in the paper
    assert found.peak_GB + stored < gigabytes
    assert found.levels["lower"][0] > found.levels["rest"][0] or method == "cg"


@pytest.mark.slow
def test_gradients_kept_on_the_cpu_cross_once_a_step() -> None:
    """To the CPU each lower gradient and the query; back q, and what is logged of it."""
    found = traced(backbone="vit_b16", mfac_device="cpu")
    places = {crossing.place for crossing in found.crossings}
    assert places == {
        "bisslight.py:algorithm_1",
        "bisslight.py:read",
        "bisslight.py:squared_lengths",
        "mfac.py:__call__",
    }
