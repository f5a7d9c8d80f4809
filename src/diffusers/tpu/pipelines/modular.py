"""`ComponentsManager` on the TPU path: its automatic offloading is what models without room on the chips do anyway."""

from .. import notices


def manage(manager, device, strategy):
    """Auto offloading of this manager is on, as its other methods see it, and hooks no model."""
    notices.warn_once(
        "auto_offload",
        "ComponentsManager.enable_auto_cpu_offload: on the TPU path models that have no room on the chips wait on the host",
    )
    manager.model_hooks, manager._auto_offload_enabled = [], True
    manager._auto_offload_device, manager._offload_strategy = device, strategy
