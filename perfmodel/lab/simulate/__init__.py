"""The engine's twin: the live scheduler with steps that take the performance model's time."""

from fastdecode.perfmodel.lab.simulate.events import Timeline, WorkerEvent, random_losses, read_events
from fastdecode.perfmodel.lab.simulate.prefill_fleet import PrefillFleet
from fastdecode.perfmodel.lab.simulate.simulated_drafts import SimulatedDrafter
from fastdecode.perfmodel.lab.simulate.simulated_machine import GpuMachine, Machine, SplitMachine, StepCost
from fastdecode.perfmodel.lab.simulate.simulator import Simulator, Slo, find_capacity
from fastdecode.perfmodel.lab.simulate.workload import SimulatedRequest, SimulatedWorkload

__all__ = [
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
    "WorkerEvent",
    "find_capacity",
    "random_losses",
    "read_events",
]
