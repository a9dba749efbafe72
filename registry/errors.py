"""Errors of the registry, all safe to pickle (args go to `super().__init__`).

RegistryError
|- InvalidNameError          a name, alias or model string that can never exist
|- NotFoundError             no such name, alias or version; or an adapter of another base
|- RegistrationError         a folder or name that is refused, with the reason; nothing is left
|- DigestMismatchError       the bytes are not those that were registered
|- RegistryUnavailableError  MLflow cannot be reached or answers nonsense; what is known stays
`- CacheFullError            no space left for a local copy
"""

from __future__ import annotations


class RegistryError(Exception):
    pass


class InvalidNameError(RegistryError):
    pass


class NotFoundError(RegistryError):
    pass


class RegistrationError(RegistryError):
    pass


class DigestMismatchError(RegistryError):
    pass


class RegistryUnavailableError(RegistryError):
    pass


class CacheFullError(RegistryError):
    pass
