"""What the paper reports, as data, so that a measured figure can stand beside the published one.

Labels are those of its source. Accuracies: test, percent (VOC07: mAP), mean ± std over 8 seeds.
"""

from typing import NamedTuple


class Reported(NamedTuple):
    """Mean ± standard deviation, and where the paper says so."""

    mean: float
    std: float
    source: str


DATASETS = ("pets", "dtd", "voc07", "flowers", "cub200", "aircrafts")  # the tables' columns


def table(text: str) -> dict[tuple[str, str, str], Reported]:
    """By backbone, arm and dataset, of a text whose first line is the table's label."""
    source, *lines = text.strip().splitlines()
    return {
        (backbone, arm, dataset): Reported(float(mean), float(std), source)
        for backbone, arm, *cells in map(str.split, lines)
        for dataset, cell in zip(DATASETS, cells, strict=True)
        for mean, std in [cell.split("±")]
    }


MAE = table("""
tab:mae_bisslight_main_results
vit_b16 PEFT      91.7±0.3 69.9±0.5 80.9±0.3 92.8±0.5 79.8±0.5 70.6±0.6
vit_b16 BiSSLight 92.1±0.2 70.3±0.4 81.7±0.2 93.5±0.3 81.2±0.3 72.7±0.3
vit_l16 PEFT      94.4±0.3 74.1±0.6 85.5±0.2 94.6±0.4 84.4±0.4 79.1±0.4
vit_l16 BiSSLight 94.7±0.2 74.9±0.4 85.9±0.1 95.8±0.2 85.6±0.3 82.2±0.3
vit_h14 PEFT      95.2±0.3 75.8±0.5 86.5±0.2 96.0±0.3 85.9±0.4 80.4±1.0
vit_h14 BiSSLight 95.5±0.2 76.7±0.2 87.3±0.1 97.2±0.1 87.2±0.2 87.1±0.3
""")
IJEPA = table("""
tab:classificaiton_acc_bisslight_ijepa
vit_h14 PEFT      94.6±0.1 73.1±0.4 82.4±0.2 95.1±0.4 86.4±0.3 76.0±0.6
vit_h14 BiSSLight 94.7±0.1 74.0±0.6 84.0±0.3 96.1±0.3 86.8±0.2 77.7±0.4
""")
BISSL = table("""
tab:classificaiton_acc_bissl_orig
vit_b16 BiSSL     92.0±0.5 70.8±0.4 81.9±0.1 93.4±0.4 81.2±0.3 72.7±0.3
""")  # its rows of PEFT and BiSSLight repeat the main table
ACCURACIES = {"mae": MAE | BISSL, "ijepa": IJEPA}  # by pretext task
# tab:lora_param_count, in millions; r = 8 of ViT-B is printed 0.30 and is 0.295 (0.29 if rounded)
LORA_RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
LORA_MILLIONS = {
    "vit_b16": (0.04, 0.07, 0.15, 0.30, 0.59, 1.18, 2.36, 4.72),
    "vit_l16": (0.10, 0.20, 0.39, 0.79, 1.57, 3.15, 6.29, 12.58),
    "vit_h14": (0.16, 0.33, 0.66, 1.31, 2.62, 5.24, 10.49, 20.97),
}
BACKBONE_MILLIONS = {"vit_b16": 85.80, "vit_l16": 303.30, "vit_h14": 630.77}
# tab:memory_single_gpu: (GB, GPUs); GB are sums of the peaks of each GPU, A40s
MEMORY = {
    "cg": {"vit_b16": (58, 2), "vit_l16": (77, 2), "vit_h14": (141, 4)},
    "mfac, on as many GPUs": {"vit_b16": (14, 2), "vit_l16": (22, 2), "vit_h14": (46, 4)},
    "mfac": {"vit_b16": (13, 1), "vit_l16": (19, 1), "vit_h14": (33, 1)},
    "peft, batch 256": {"vit_b16": (14, 1), "vit_l16": (36, 1), "vit_h14": (80, 2)},
    "peft": {"vit_b16": (4, 1), "vit_l16": (10, 1), "vit_h14": (22, 1)},
}


def memory_of(method: str, backbone: str) -> tuple[int, int] | None:
    """(GB, GPUs) that the paper gives for mfac, cg or peft (at batch 64), on the fewest GPUs."""
    return MEMORY.get(method, {}).get(backbone)


def reported(backbone: str, dataset: str, arm: str, pretext: str) -> Reported | None:
    """The paper's figure for PEFT, or for BiSSLight or BiSSL with PEFT after it, if it has one."""
    return ACCURACIES.get(pretext, {}).get((backbone, arm, dataset))
