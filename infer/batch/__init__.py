"""The data of a step: draft trees, what a request asks for, and what is learnt of its drafts."""
