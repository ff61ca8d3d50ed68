"""Formats of JSON Schema that a grammar enforces. Their numbers are bounded, so that a model cannot write one for ever.

Dates are of the calendar, so that clients' programs can read them: no year 0, and 29 February in leap years only.
"""

from __future__ import annotations

from typing import Any

MAX_FRACTION = 9  # digits of a second's fraction: nanoseconds
MAX_DURATION = 6  # digits of a duration's number: a million years or weeks fit the types that clients use
FRACTION = rf"(?:\.[0-9]{{1,{MAX_FRACTION}}})?"
TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{FRACTION}(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
LEAP = "(?:0[48]|[2468][048]|[13579][26])"
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{LEAP}|{LEAP}00)-02-29)"
)
NUMBER = f"[0-9]{{1,{MAX_DURATION}}}"
MINUTES = f"{NUMBER}M(?:{NUMBER}S)?"
TIMES = f"T(?:{NUMBER}H(?:{MINUTES})?|{MINUTES}|{NUMBER}S)"
MONTHS = f"{NUMBER}M(?:{NUMBER}D)?"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{}[0-9a-fA-F]{{3}}-{}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$"
POINTER = "(?:/(?:[^/~]|~[01])*)*"

# RFC 3339 (dates, and durations in its appendix A), RFC 2673, RFC 9562, RFC 6901. None: llguidance's own.
FORMATS: dict[str, str | None] = {
    "date-time": f"^{DATE}[tT]{TIME}$",
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "duration": f"^P(?:(?:{NUMBER}Y(?:{MONTHS})?|{MONTHS}|{NUMBER}D)(?:{TIMES})?|{TIMES}|{NUMBER}W)$",
    "uuid": UUID.format("[0-9a-fA-F]", "[0-9a-fA-F]"),
    **{f"uuid{version}": UUID.format(version, "[89abAB]") for version in (1, 3, 4, 5, 6, 7, 8)},  # pydantic's
    "ipv4": rf"^(?:{OCTET}\.){{3}}{OCTET}$",
    "json-pointer": f"^{POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{POINTER})$",
    **dict.fromkeys(("email", "hostname", "ipv6", "uri")),
}
LIMITS: dict[str, dict[str, Any]] = {  # of RFC 5321 and RFC 1035, beside llguidance's own
    "email": {"maxLength": 254, "pattern": r"^[^@]{1,64}@(?:[^.]{1,63}\.)*[^.]{1,63}$"},
    "hostname": {"maxLength": 253},
}
# Beside a `pattern` only the fraction is bounded: libraries write patterns of times without an offset or seconds.
BESIDE_A_PATTERN = {
    name: rf"^[^.]*(?:\.[0-9]{{1,{MAX_FRACTION}}}(?:[^0-9.][^.]*)?)?$" for name in ("date-time", "time")
}
