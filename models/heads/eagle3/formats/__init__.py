"""The formats of EAGLE-3 heads; Headway exports them in speculators'."""

from models.formats import speculators
from models.heads.eagle3.formats import llama_cpp, safeailab

FORMATS, LAYOUT = (speculators.FORMAT, safeailab.FORMAT, llama_cpp.FORMAT), speculators.FORMAT
