"""Errors, by who can mend them.

    TierCacheError
    ├── ConfigError          the operator: a setting, a path, two settings that contradict
    ├── TierError            the medium: turned into a miss, a counter and a degraded state
    │   ├── TierFull         no room where room was promised
    │   ├── TierUnavailable  the medium cannot be used at all right now
    │   │   ├── TierOffline  it was not even tried, since it has failed too often
    │   │   └── TierLost     this hold on it is gone for good; only opening it anew may help
    │   └── PageCorrupt      bytes came back that are not the ones that were stored
    ├── CodecError           the stored form cannot be turned back into a page
    ├── LeaseError           the caller: a lease was used after its end, or twice
    └── RetentionError       the caller: a pin or a priority that cannot be honoured

"No room" and "not found" are ordinary return values of the cache, not errors.
"""


class TierCacheError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(TierCacheError):
    """A setting that cannot work. The message names the field and what would be right."""


class TierError(TierCacheError):
    """A tier could not do what it was asked to."""


class TierFull(TierError):
    """The tier has no room for the bytes."""


class TierUnavailable(TierError):
    """The tier cannot be used at all at present."""


class TierOffline(TierUnavailable):
    """The tier was not tried: it failed too often, and is probed in the background."""


class TierLost(TierUnavailable):
    """What was opened is no more: the process behind it has ended, or its files are others."""


class PageCorrupt(TierError):
    """A stored page failed its length, identity or checksum test."""


class CodecError(TierCacheError):
    """A stored form could not be decoded."""


class LeaseError(TierCacheError):
    """A lease was used outside its life."""


class RetentionError(TierCacheError):
    """A pin, a priority or a time that cannot be honoured. The message has the figures."""
