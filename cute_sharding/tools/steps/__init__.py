"""Plans of whole steps: :func:`.plan_step.plan_step`, which runs a step without devices, in a
process of its own (``python -m cute_sharding.tools.steps``).
"""
