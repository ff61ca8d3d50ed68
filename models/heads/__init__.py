"""The heads by name. Importing this reads names and options; a head's module and formats are loaded when asked for."""

from __future__ import annotations

from models.heads.config import NewHeadConfig
from models.heads.dflash.config import DFlashOptions
from models.heads.dflash2.config import DFlash2Options
from models.heads.draft_model.config import DraftModelOptions
from models.heads.dspark.config import DSparkOptions
from models.heads.eagle.config import EagleOptions
from models.heads.eagle3.config import Eagle3Options
from models.heads.lstm.config import LstmOptions
from models.heads.medusa.config import MedusaOptions
from models.heads.mlp.config import MlpOptions
from models.heads.mtp.config import MtpOptions
from models.heads.p_eagle.config import PEagleOptions

HEADS: dict[str, type[NewHeadConfig]] = {
    "eagle": EagleOptions,
    "eagle3": Eagle3Options,
    "mtp": MtpOptions,
    "medusa": MedusaOptions,
    "mlp": MlpOptions,
    "lstm": LstmOptions,
    "p-eagle": PEagleOptions,
    "dflash": DFlashOptions,
    "dspark": DSparkOptions,
    "dflash2": DFlash2Options,
    "draft-model": DraftModelOptions,
}
SHIPPED_BY_TARGETS = "mtp"  # in their checkpoints
DEFAULT_HEAD = "eagle3"  # of `head=auto` where no head exists; error messages suggest it
