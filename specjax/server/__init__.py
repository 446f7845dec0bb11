"""An HTTP server over the engine, for clients of OpenAI's interface. Needs the extra ``serve``."""
