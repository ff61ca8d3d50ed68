"""How far drafting pays: costs, acceptance, and the plan that follows from both."""
