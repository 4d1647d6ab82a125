"""Patterns for those values of `format` that llguidance takes too loosely (days and leap seconds that do not exist) or
too tightly (quoted mailboxes, IPv4 inside IPv6)."""

from __future__ import annotations

_DATE = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
    "|[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)


def _leap_seconds() -> str:
    """23:59:60 UTC as local time, for every offset of whole quarters of an hour, which all time zones have."""
    out = []
    for quarters in range(-95, 96):
        hours, minutes = divmod(abs(quarters) * 15, 60)
        local = (23 * 60 + 59 + quarters * 15) % (24 * 60)
        signs = "[+-]" if quarters == 0 else r"\+" if quarters > 0 else "-"
        zulu = "[Zz]|" if quarters == 0 else ""
        out.append(rf"{local // 60:02}:{local % 60:02}:60(?:\.[0-9]+)?(?:{zulu}{signs}{hours:02}:{minutes:02})")
    return "|".join(out)


_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})|{_leap_seconds()}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_TAIL = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"  # the last 32 bits


def _ipv6() -> str:
    """RFC 3986, section 3.2.2."""
    forms = [f"(?:{_GROUP}:){{6}}{_TAIL}"]
    for after in range(5, -1, -1):  # groups behind the "::", before the tail
        before = f"(?:(?:{_GROUP}:){{0,{5 - after - 1}}}{_GROUP})?" if after < 5 else ""
        forms.append(f"{before}::" + (f"(?:{_GROUP}:){{{after}}}" if after else "") + _TAIL)
    forms.append(f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}")
    forms.append(f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::")
    return "|".join(forms)


_IPV6 = _ipv6()
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_EMAIL = (
    rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})"
    rf"@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\]|\[IPv6:(?:{_IPV6})\])"  # RFC 5321, section 4.1
)

PATTERNS = {
    name: f"^(?:{pattern})$"
    for name, pattern in (
        ("date", _DATE),  # RFC 3339
        ("time", _TIME),
        ("date-time", f"(?:{_DATE})[Tt](?:{_TIME})"),
        ("email", _EMAIL),
        ("ipv6", _IPV6),
    )
}
