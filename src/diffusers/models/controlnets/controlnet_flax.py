"""The ControlNet of Stable Diffusion and SDXL on TPU: sharded over the width of the maps, as the UNet that takes its residuals."""

from ..unets.unet_2d_condition_flax import plan_of_maps
from .controlnet import ControlNetModel, ControlNetOutput


PLAN = plan_of_maps(ControlNetModel, ControlNetOutput, ("sample", "controlnet_cond"))
