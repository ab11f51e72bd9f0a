"""An incident as Markdown: headings and tables, as TensorBoard's page of texts shows them."""

from __future__ import annotations

from stabilizer.localize.incident import Incident
from stabilizer.localize.rows import TEXTS, incident_sections
from stabilizer.localize.table import incident_advice, incident_lines, incident_title
from stabilizer.markdown import bullets, escaped, heading, table

__all__ = ["incident_markdown"]


def incident_markdown(incident: Incident) -> str:
    """An incident as Markdown.

    Args:
        incident: What was found. Its texts come from the data, and stay texts.

    Example:
        >>> print(incident_markdown(Incident(step=7, type="D", observed_norm=9.0, threshold=3.0)).splitlines()[0])
        ### Gradient spike at step 7: D, data
    """
    summary = [f"**{escaped(incident.summary, limit=2000)}**"] if incident.summary else []
    lines = [*incident_lines(incident), ("next", incident_advice(incident))]
    parts = [heading(incident_title(incident)), *summary, bullets(lines)]
    for section in incident_sections(incident):
        parts += [heading(section.title, level=4), table(section.headings, section.rows, left=TEXTS)]
        parts += [escaped(caption) for caption in section.captions]
    return "\n\n".join(parts)
