"""What is wrong with a source, collected while its parts are read one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from residentd.errors import Finding, SourceError

FINDINGS_MAX = 50


@dataclass(slots=True)
class Report:
    """Findings in the order in which they were met."""

    findings: list[Finding] = field(default_factory=list, kw_only=True)

    def add(self, what: str, where: str, remedy: str) -> None:
        self.findings.append(Finding(what, where, remedy))

    def is_wrong(self, where: str) -> bool:
        """Whether anything was found at that place."""
        return any(finding.where == where for finding in self.findings)

    def raise_if_any(self) -> None:
        """Raises SourceError with the first FINDINGS_MAX, and how many more there are."""
        if self.findings:
            hidden = len(self.findings) - FINDINGS_MAX
            more = [Finding(f"{hidden:,} more findings", "source", "Solve these first")] if hidden > 0 else []
            raise SourceError(self.findings[:FINDINGS_MAX] + more)
