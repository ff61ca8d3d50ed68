"""P-EAGLE heads have no format of their own: the speculators format, `peagle`."""

from models.formats import speculators

FORMATS, LAYOUT = (speculators.FORMAT,), speculators.FORMAT
