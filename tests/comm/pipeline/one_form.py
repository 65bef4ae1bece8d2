"""What enters and leaves a layer where a run has one form for all links."""

from decentral.core.fragments import ActivationForms, Layout


def one_form(layout: Layout) -> ActivationForms:
    """Gradients are like the first section."""
    return ActivationForms((layout,), (layout[:1],))
