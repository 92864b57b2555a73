"""A step time that no plan can beat, in closed form; the sharp bound is that of `prices`.

Let C be the healthy time of all layers for one micro-batch, M the micro-batches, y the rates of the groups,
H the largest sum of 1 / y that a grouping of the nodes can have, and D a number of pipelines. For a
pipeline of groups with H_G = sum 1 / y_j and m micro-batches, with stage times t_j:

- ``sum_j t_j >= C * y_min``, as every layer runs on one of the groups;
- ``max_j t_j >= C / H_G``, as group j holds layers of healthy time at most ``max t / y_j``, together C.

So ``T >= (m - 1) * C / H_G + C * y_min``, that is ``m <= 1 + H_G * (T / C - y_min)``. Added up over the
pipelines, whose groups are disjoint, ``T >= C * (y_min + (M - D) / H)``. And as
``sum_j t_j >= max_j t_j >= C / H_G``, also ``T >= m * C / H_G``, which adds up to ``T >= M * C / H``.
"""

from __future__ import annotations

import numpy as np

from malleus_ds.planner.groups import Cluster
from malleus_ds.planner.workload import Workload


def closed_form_bound_s(workload: Workload, cluster: Cluster, num_pipelines: int) -> float:
    """Bound on the step time of every plan with at most ``num_pipelines`` pipelines, in seconds."""
    rates = np.array([kind.least_rate for kind in cluster.types])
    work_s, speed = float(workload.prefix_s[-1]), cluster.worth(1 / rates)
    fill_s = work_s * (float(rates.min()) + (workload.num_micro_batches - num_pipelines) / speed)
    return max(fill_s, workload.num_micro_batches * work_s / speed)
