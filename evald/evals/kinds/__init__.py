"""The kinds of eval: what is asked, and what of the answer counts."""

from evald.evals.kinds.choose import kind_of
from evald.evals.kinds.contract import Answer, Asker, Kind

__all__ = ["Answer", "Asker", "Kind", "kind_of"]
