"""The engine's twin: the live scheduler object, with steps that cost what the performance model says."""

from fastdecode.perfmodel.simulate.events import Event, Timeline, random_losses, read_events
from fastdecode.perfmodel.simulate.machine import GpuMachine, Machine, SplitMachine, StepCost
from fastdecode.perfmodel.simulate.prefill import PrefillFleet
from fastdecode.perfmodel.simulate.simulator import Simulator, Slo, find_capacity
from fastdecode.perfmodel.simulate.speculation import SimulatedDrafter
from fastdecode.perfmodel.simulate.workload import SimulatedRequest, SimulatedWorkload

__all__ = [
    "Event",
    "GpuMachine",
    "Machine",
    "PrefillFleet",
    "SimulatedDrafter",
    "SimulatedRequest",
    "SimulatedWorkload",
    "Simulator",
    "Slo",
    "SplitMachine",
    "StepCost",
    "Timeline",
    "find_capacity",
    "random_losses",
    "read_events",
]
