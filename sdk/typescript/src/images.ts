/** What sandboxes start from: `Sandbox.create({ image })`. Paths would be the server's, so references are of registries. */

import { connect, type Plan } from "./connection.js";
import { error, refuseUnknown } from "./errors.js";
import type { ImageInfo, ImageProgress, Images } from "./generated.js";
import { read } from "./shapes.js";
import type { ServerOptions } from "./stays.js";

export interface MakeOptions extends ServerOptions {
  /** Told every word about an image that is being made. */
  progress?: (word: ImageProgress) => unknown;
}

export const Image = {
  /** Fetch what a reference means now, and unpack it. */
  pull(reference: string, options: MakeOptions = {}): Promise<ImageInfo> {
    return make("/v1/images/pull", { json: { reference } }, options);
  },

  /** Make the image of a recipe: `from` and `steps`, docs/guides/images.md. */
  build(recipe: Record<string, unknown>, options: MakeOptions = {}): Promise<ImageInfo> {
    return make("/v1/images/build", { json: { recipe } }, options);
  },

  /** An image that is here. */
  async get(reference: string, options: ServerOptions = {}): Promise<ImageInfo> {
    return read("ImageInfo", await connect(options).call("GET", "/v1/images/find", { query: { reference }, signal: options.signal }));
  },

  /** Remove an image; `image_in_use` while a sandbox is made of it. */
  async remove(reference: string, options: ServerOptions = {}): Promise<void> {
    await connect(options).call("DELETE", "/v1/images", { query: { reference }, signal: options.signal });
  },

  /** Remove what is half-made, and beyond `images.max_mib` what was not used for longest; what went. */
  async gc(options: ServerOptions = {}): Promise<ImageInfo[]> {
    const answer = await connect(options).call("POST", "/v1/images/collect", { signal: options.signal, repeatable: true, waitS: null });
    return read<Images>("Images", answer).images;
  },

  /** The images that are here, oldest first. */
  list(options: ServerOptions = {}): Promise<ImageInfo[]> {
    return connect(options).list("/v1/images", "Images", "images", { signal: options.signal });
  },
};

async function make(path: string, plan: Plan, options: MakeOptions): Promise<ImageInfo> {
  const { progress, signal, server, apiKey, requestTimeoutS, retries, ...unknown } = options;
  refuseUnknown("Image", unknown);
  const connection = connect({ server, apiKey, requestTimeoutS, retries });
  for await (const { data } of await connection.events("POST", path, { ...plan, signal, last: "done" })) {
    const word = read<ImageProgress>("ImageProgress", JSON.parse(data));
    await progress?.(word);
    if (word.image !== null) return word.image;
  }
  throw error("internal_error", "the image was not made, and nothing was said why");
}
