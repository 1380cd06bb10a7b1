"""What a generator does for the engines of its node: it holds images of weights, which arrive bucket by bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray

from actors.weights.bucket import Bucket
from actors.weights.checksum import WeightBytes
from actors.weights.node_image import NodeImage
from actors.weights.part import Part
from service.errors import WeightsGone


class ImageHolder:
    """Part of an actor: its images, by numbers that the driver gives."""

    def __init__(self) -> None:
        self._images: dict[int, NodeImage] = {}
        self._released: set[int] = set()
        """Images that were to be released before they were held."""

    async def hold_image(self, number: int, parts: Sequence[Part]) -> str:
        """Hold an image of weights for all engines of this node until `release_image`; returns where it lies.

        Raises:
            WeightsGone: it was released before: Ray begins calls with large arguments after later ones.
        """
        if number in self._released:
            raise WeightsGone("these weights are not held any more")
        if number not in self._images:
            self._images[number] = NodeImage(parts)
        return self._images[number].path

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    async def write_image(
        self, number: int, bucket: Bucket, message: WeightBytes, passes_on: bool
    ) -> tuple[WeightBytes | None, bool]:
        """Write a bucket into an image; returns the message to pass on, and False where the image lacks its base.

        Raises:
            WeightsGone: there is no such image any more, or it has newer weights.
            ValueError: the bytes differ from what was sent.
        """
        if (image := self._images.get(number)) is None:
            raise WeightsGone("these weights are not held any more")
        written = await asyncio.to_thread(image.write, bucket, message)
        return message if passes_on else None, written

    async def release_image(self, number: int) -> None:
        """Free an image; one of an earlier process is ignored, its memory is freed already."""
        if (image := self._images.pop(number, None)) is None:
            self._released.add(number)
        else:
            await asyncio.to_thread(image.close)
