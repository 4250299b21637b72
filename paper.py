"""The paper's tables: test accuracy (%; VOC07: mAP), mean ± std of 8 seeds; memory."""

from typing import NamedTuple


class Reported(NamedTuple):
    """Mean ± standard deviation, and the label of the paper's table."""

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
ACCURACIES = {"mae": MAE | BISSL, "ijepa": IJEPA}  # by pretext task; after BiSSL(ight) comes PEFT
# tab:memory_single_gpu: (GB, A40 GPUs), on the fewest GPUs of the table; GB sum each GPU's peak
MEMORY = {
    "cg": {"vit_b16": (58, 2), "vit_l16": (77, 2), "vit_h14": (141, 4)},
    "mfac": {"vit_b16": (13, 1), "vit_l16": (19, 1), "vit_h14": (33, 1)},
    "peft": {"vit_b16": (4, 1), "vit_l16": (10, 1), "vit_h14": (22, 1)},  # with batches of 64
}
