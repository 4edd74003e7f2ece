/** The TCP ports of a sandbox, from outside. */

import { once } from "node:events";
import { createServer, type AddressInfo, type Server, type Socket } from "node:net";
import { pipeline } from "node:stream/promises";

import { error } from "./errors.js";
import type { Tunnel } from "./websocket.js";

/** A port of this machine's loopback that is a port inside, until it is closed. */
export class Forward implements AsyncDisposable {
  readonly #server: Server;
  readonly #open = new Set<Socket>();

  private constructor(dial: () => Promise<Tunnel>) {
    this.#server = createServer({ allowHalfOpen: true }, (socket) => void this.#pass(socket, dial));
  }

  /** @internal */
  static async listen(localPort: number, dial: () => Promise<Tunnel>): Promise<Forward> {
    const made = new Forward(dial);
    try {
      made.#server.listen(localPort, "127.0.0.1");
      await once(made.#server, "listening");
    } catch (cause) {
      throw error("address_unavailable", `cannot listen on 127.0.0.1:${localPort}: ${String((cause as Error).message)}`, {
        hint: "leave localPort out for a free one",
        cause,
      });
    }
    return made;
  }

  /** The local port, on 127.0.0.1. */
  get port(): number {
    return (this.#server.address() as AddressInfo).port;
  }

  async #pass(socket: Socket, dial: () => Promise<Tunnel>): Promise<void> {
    this.#open.add(socket);
    socket.on("close", () => this.#open.delete(socket));
    socket.on("error", () => undefined); // whoever came has left
    try {
      const tunnel = await dial();
      socket.on("close", () => tunnel.destroy());
      await Promise.all([pipeline(socket, tunnel), pipeline(tunnel, socket)]);
    } catch {
      socket.resetAndDestroy(); // nobody listens inside, or the sandbox went: as if this port were the one inside
    }
  }

  /** Close the local port and what goes through it. Twice is harmless. */
  async close(): Promise<void> {
    for (const socket of this.#open) socket.destroy();
    if (!this.#server.listening) return;
    this.#server.close();
    await once(this.#server, "close");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
