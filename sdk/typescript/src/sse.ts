/**
 * Server-sent events: a parser that takes bytes in any pieces, line ends of any kind and comments (the server's heartbeat), and
 * nothing else of the format than the server uses: `id`, `event`, `data`.
 */

export interface ServerEvent {
  kind: string;
  data: string;
  id: string | undefined;
}

/** Feed it text; it answers with the events that are complete. */
export class EventParser {
  #rest = "";
  #kind = "";
  #data: string[] = [];
  #id: string | undefined;

  feed(text: string): ServerEvent[] {
    const events: ServerEvent[] = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop() ?? "";
    for (const line of lines) {
      const event = this.#line(line);
      if (event !== undefined) events.push(event);
    }
    return events;
  }

  #line(line: string): ServerEvent | undefined {
    if (line === "") return this.#dispatch();
    const colon = line.indexOf(":");
    if (colon === 0) return undefined;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#kind = value;
    else if (field === "data") this.#data.push(value);
    else if (field === "id" && !value.includes("\0")) this.#id = value;
    return undefined;
  }

  #dispatch(): ServerEvent | undefined {
    const event = { kind: this.#kind || "message", data: this.#data.join("\n"), id: this.#id };
    const complete = this.#data.length > 0;
    this.#kind = "";
    this.#data = [];
    this.#id = undefined;
    return complete ? event : undefined;
  }
}

/** The events of a body. */
export async function* parseEvents(body: AsyncIterable<Uint8Array>): AsyncGenerator<ServerEvent, void, undefined> {
  const parser = new EventParser();
  const decoder = new TextDecoder();
  for await (const piece of body) yield* parser.feed(decoder.decode(piece, { stream: true }));
}
